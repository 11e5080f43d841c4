"""A proxy before OpenAI-compatible servers that sends each prompt where its prefix lies."""
