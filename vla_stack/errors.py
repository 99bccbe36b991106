"""The one error type that reaches a person as a single line instead of a traceback."""


class UserError(Exception):
    """Something that the person at the keyboard can mend.

    Args:
        message: What is wrong, naming the file, key or value.
        remedy: What to do about it, in one sentence; empty where the message says it all.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message if not remedy else f"{message} -- {remedy}")
        self.message = message
        self.remedy = remedy
