"""`make chaos`: seeded runs of thousands of rows under random faults, each ending in proof.

    plan          which fault strikes when, a pure function of the seed
    faults        the run under attack; how each fault is done
    play          one seed: attack, wait for the end, prove
    report        what came of it, in one line
    side_by_side  several seeds at once, each in a process of its own
"""
