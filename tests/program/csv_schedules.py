"""Schedules that no generator writes, as users' CSV: text, and layers per stage that are not even."""

CSV = {
    # Two microbatches ahead, then backwards in another order than forwards; messages wait in the inbox.
    "odd order": "0F0,0F1,0F2,,0B1,0B2,0B0\n,1F0,1F1,1B1,1F2,1B2,1B0\n",
    # Looping: stages 0 and 2 on device 0, 1 and 3 on device 1.
    "two chunks": "0F0,0F1,2F0,2F1,2B0,0B0,2B1,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n",
    # Four stages in a V: 1 and 2 hand over on device 1, without a transfer.
    "V": "0F0,0F1,3F0,3B0,0F2,3F1,3B1,0B0,3F2,3B2,0B1,0B2\n1F0,2F0,1F1,2F1,2B0,1B0,1F2,2F2,2B1,1B1,2B2,1B2\n",
    "three chunks on one device": "0F0,0F1,1F0,2F0,2B0,1F1,1B0,2F1,2B1,1B1,0B1,0B0\n",
}
LAYERS_PER_STAGE = {
    "odd order": (3, 1),
    "two chunks": (1, 2, 2, 1),
    "V": (1, 3, 2, 1),
    "three chunks on one device": (2, 1, 2),
}
