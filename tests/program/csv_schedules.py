"""Schedules that no generator writes, as users' CSV: text, and layers per stage that are not even."""

CSV = {
    # Two microbatches ahead, then backwards in another order than forwards; messages wait in the inbox.
    "odd order": "0F0,0F1,0F2,,0B1,0B2,0B0\n,1F0,1F1,1B1,1F2,1B2,1B0\n",
    # Looping: stages 0 and 2 on device 0, 1 and 3 on device 1.
    "two chunks": "0F0,0F1,2F0,2F1,2B0,0B0,2B1,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n",
    # Four stages in a V: 1 and 2 hand over on device 1, without a transfer.
    "V": "0F0,0F1,3F0,3B0,0F2,3F1,3B1,0B0,3F2,3B2,0B1,0B2\n1F0,2F0,1F1,2F1,2B0,1B0,1F2,2F2,2B1,1B1,2B2,1B2\n",
    "three chunks on one device": "0F0,0F1,1F0,2F0,2B0,1F1,1B0,2F1,2B1,1B1,0B1,0B0\n",
    # 1F1B of which two devices evict some microbatches, whole and in another order than they came.
    "some leave": (
        "0F0,0F1,0EVICT1,0F2,0F3,0EVICT3,0B0,0LOAD1,0B1,0B2,0LOAD3,0B3\n"
        "1F0,1EVICT0,1F1,1F2,1LOAD0,1B0,1F3,1B1,1B2,1B3\n"
        "2F0,2F1,2B0,2F2,2B1,2F3,2B2,2B3\n"
        "3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3\n"
    ),
    "leaves twice": (
        "# parked: 2/3 1\n"
        "0F0,0EVICT0,0F1,0EVICT1,0F2,0LOAD0,0F3,0EVICT0,0B3,0B2,0LOAD1,0B1,0LOAD0,0B0\n"
        "1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0\n"
    ),
    # Every device parks at its partner, and has its partner's pages.
    "crosswise": (
        "# parked: 1/2 1/3 1 2/3\n"
        "0F0,0EVICT0,0F1,0EVICT1,0F2,0F3,0LOAD0,0B0,0LOAD1,0B1,0B2,0B3\n"
        "1F0,1EVICT0,1F1,1EVICT1,1F2,1LOAD0,1F3,1B0,1LOAD1,1B1,1B2,1B3\n"
        "2F0,2EVICT0,2F1,2EVICT1,2F2,2LOAD0,2F3,2B0,2LOAD1,2B1,2B2,2B3\n"
        "3F0,3EVICT0,3F1,3EVICT1,3F2,3LOAD0,3F3,3B0,3LOAD1,3B1,3B2,3B3\n"
    ),
    # What leaves device 1 comes back in the round after the one in which it has landed.
    "away for a moment": ("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1EVICT1,1F2,1LOAD1,1B0,1B1,1F3,1B2,1B3\n"),
    "chunks leave": (
        "0F0,0EVICT0,0F1,2F0,0EVICT1,2EVICT0,2F1,0LOAD0,2LOAD0,2B0,0B0,0LOAD1,2B1,0B1\n"
        "1F0,1EVICT0,1F1,3F0,3B0,3F1,3B1,1LOAD0,1B0,1B1\n"
    ),
    "V leaves": (
        "0F0,0EVICT0,0F1,3F0,3B0,0F2,3F1,3B1,0LOAD0,0B0,3F2,3B2,0B1,0B2\n"
        "1F0,1EVICT0,2F0,2EVICT0,1F1,2F1,2LOAD0,2B0,1LOAD0,1B0,1F2,2F2,2B1,1B1,2B2,1B2\n"
    ),
}
LAYERS_PER_STAGE = {
    "odd order": (3, 1),
    "two chunks": (1, 2, 2, 1),
    "V": (1, 3, 2, 1),
    "three chunks on one device": (2, 1, 2),
    "some leave": (2, 1, 3, 2),
    "leaves twice": (3, 2),
    "crosswise": (2, 3, 1, 3),
    "away for a moment": (3, 2),
    "chunks leave": (1, 2, 2, 3),
    "V leaves": (1, 3, 2, 1),
}
