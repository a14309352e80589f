"""How do kernels come to be? spec: what is compiled; compiler: how; cache: where kept; driver: loading, launching."""
