"""The commands of ``active-party``: their arguments in ``program``, a module for what each does."""
