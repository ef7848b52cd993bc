"""gRPC: translates. Alone knows grpc and protobuf."""
