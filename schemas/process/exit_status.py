"""Exit statuses after which a restart would end in the same way."""

BAD_USAGE = 2
NEVER_STARTS = 3
