"""The demo: two engines of a real language model share one system prompt through a real sidecar.

The process that runs it imports no engine; each engine is a process of its own (kvstore.demo.engine).
"""
