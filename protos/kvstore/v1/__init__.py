"""Generated protobuf and gRPC code of the public API `kvstore.v1`; made by `make protos`, never edited by hand."""
