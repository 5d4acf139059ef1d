"""Methods: the generators of schedules, one file each, and the table that says all that is known of them.

`registry` is the table, of `method.Method` values, whose options are `option.Option` values. Shared by several
generators: `_bidirectional` (closed form of two replicas in opposite directions), `_early_forwarding` (BitPipe's),
`_dualpipe` (the eight phases of DualPipe and DualPipeV) and `_zero_bubble` (ZB-H1, ZB-H2, ZB-V, V-Half, V-Min).

A generator is called by `Method.build`, which has checked its options; it checks none itself.
"""
