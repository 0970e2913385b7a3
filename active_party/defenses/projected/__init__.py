"""The mathematics of projected labels: functions of the rows, noisy sums over them, soft targets.

`features` makes columns of what the active party knows about the rows without their labels,
`design` turns them into weights whose sensitivity is exact, `release` adds up the weighted labels
and puts noise on the sums, and `posterior` makes soft targets of all sums so far. Nothing here
knows a protocol, a file or a clock.
"""
