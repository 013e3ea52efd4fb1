"""The light engine: stands in for SGLang where a rollout is tried, and not a model.

It has SGLang's command line and wire format, starts in half a second, and obeys the fault switches
of its host. Everything around it is the real thing: roles, units, gates, entry. Standard library
only: `build.py` packs it as a build of its own, which the hosts receive like any other.
"""
