"""Other projects' routing rules, re-told from their source: one file each, which names it. None of their code is used.

They see the engines themselves, exactly and without delay, which none of them does in a cluster: this flatters them.
"""
