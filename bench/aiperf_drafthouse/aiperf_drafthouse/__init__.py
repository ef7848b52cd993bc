"""A transport plugin of aiperf for Drafthouse's gRPC."""
