"""The ledger: an index of the files, so that resuming and counting never read them again.

Invariant: the files are the truth and the ledger a cache. Whatever it says can be read from the files once more, it
does so by itself when it is missing, damaged or another version's, and every change carries its tally in the same
transaction. Two processes write it: the producer registers the rows of the input, the collector commits completions.

    schema   tables, and the records that go in and out       passes   which rows were seen in this reading of the input
    store    one connection, transactions, slots and tally     files    what a line of our files says
    tally    merging and counting, pure                        rows     the producer's operations
                                                               ledger   everybody's
"""

from app.ledger.ledger import Ledger
from app.ledger.schema import Bookmark, Committed, DatasetCounts, Missing, Seen, State, Torn

__all__ = ["Bookmark", "Committed", "DatasetCounts", "Ledger", "Missing", "Seen", "State", "Torn"]
