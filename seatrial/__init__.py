"""Seatrial: what the playbooks and the gates know about serving an LLM."""
