"""What is done to a run's files while nobody generates: no GPU, no server, no Redis.

Invariant: every change of files that exist goes through `switch`: what a crash leaves is the old state or the new one,
and the next start of anything finishes the change. Only whoever holds both locks of the run changes anything here;
`torn` alone is the collector's, who has one of them.

    switch    several files replaced as one                    redo      samples derived again with other filters
    scratch   sets and joins on temporary disk                 retry     completions made pending again
    shards    Parquet                                          export    conversations and shards for trainers
    torn      remains of completions that lack a turn
"""
