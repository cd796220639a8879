"""What a trainer imports: the wire protocol, WeightPublisher and the HTTP client. No Paddle, no torch."""
