"""Generated messages and stubs of `drafthouse.v1`. Written by `make gen`; do not edit."""
