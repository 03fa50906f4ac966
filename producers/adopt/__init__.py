"""Answers that another script saved, taken into a run if they can be proven to be answers to its prompts.

Invariant: a line is trusted only if its prompt ids are, id by id, what this run would send for a row of its input, and
nothing that the line says of its answer contradicts the answer's ids. Whatever is not trusted is generated.

    foreign   the directory: its files, what someone would count by hand, and lines with their fields by our names
    index     the rows of the input with their prompts, on temporary disk
    proof     what has to hold of a line, one check after the other; the closed list of reasons
    story     a directory through the proof and into the run
"""
