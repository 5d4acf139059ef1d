"""Methods: the generators of schedules, one file each, and the table that says all that is known of them.

`registry` is the table, of `method.Method` values, whose options are `option.Option` values. Shared by several
generators: the closed form of two replicas in opposite directions in `chimera`, the eight phases of DualPipe
and DualPipeV in `dualpipe`, and `_zero_bubble` (ZB-H1, ZB-H2, ZB-V, V-Half, V-Min).

A generator is called by `Method.build`, which has checked its options; it checks none itself.
"""
