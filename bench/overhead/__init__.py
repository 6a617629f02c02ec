"""What a router itself costs, with replicas behind it that take next to no time.

`__main__` runs rounds: in each every contender is started anew (`contenders`)
before one process of `fake` replicas, and one process of `load` sends it every
case's (`case`) ready prompts (`prompts`). `measure` takes one sample, `figures`
and `report` make of the samples what is shown.
"""
