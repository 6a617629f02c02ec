"""The load generator: a process of its own, with little to do for each request.

`__main__` is its process, `talk` what it is told and says. `connection` sends
and times one request at a time, `pace` sends many.
"""
