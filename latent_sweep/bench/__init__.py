"""latent-sweep bench: how fast this package is on this machine, beside the bare backbone and the usual way.

run.py          the whole: which parts there are, and the report they make together
workbench.py    what is measured and how much of it; the backbone and what all parts do with it
rows.py         turns, medians, targets
steps.py answers.py processes.py   the parts, each a function from a workbench to rows
usual_way.py    the same sweep as a user would write it with peft, the transformers Trainer and Ray Tune
"""
