"""The one error that a user of slidedp-prepare can cause."""


class InputError(Exception):
    """Bad input: says where, which field, what is wrong and what to do."""

    def __init__(self, where, message, field=None):
        place = f"{where}: field '{field}'" if field else str(where)
        super().__init__(f"{place}: {message}")
