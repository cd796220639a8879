"""The HTTP face and the command line. Never imports Paddle."""
