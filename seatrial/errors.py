"""The one base class of every error that Seatrial raises on purpose."""


class SeatrialError(Exception):
    """Something a person can mend: the message says where, what, and what to do now."""
