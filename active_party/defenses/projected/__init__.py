"""Projected labels: functions of the rows, noisy sums over them, and soft targets.

`features` makes columns of what the active party knows about the rows without their labels,
`design` turns them into weights whose sensitivity is exact, `release` adds up the weighted labels
and puts noise on the sums, `posterior` makes soft targets of all sums so far, and `stages` is the
defense that begins them in the course of a run, by its `settings`.
"""
