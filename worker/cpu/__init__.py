"""What makes Paddle fast on a CPU: settings before it is loaded, and the wheel's own oneDNN."""
