"""Nodes that share what they hold: who is there, who holds which prefix, and where a prompt should go."""
