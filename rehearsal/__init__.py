"""The rehearsal of a rollout on this machine."""
