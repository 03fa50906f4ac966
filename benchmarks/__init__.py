"""What things cost and how fast they are, measured: one command each, said in its first lines; nothing of the product
imports them. Figures in the documentation name the benchmark that made them.
"""
