"""The one exception that reaches a user as a plain message instead of a traceback."""


class UserError(Exception):
    """Something that the user can mend. The text says what is wrong, where, and what to write instead.

    `exit_code`: 2 for bad arguments or configuration, 1 for everything else.
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code
