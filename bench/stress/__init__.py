"""Four cache engines in trouble: is a byte wrong, a slot lost, the lock held long, does any grow?

`troubles` is the seeded schedule of what happens to engines, their disks and their store. `engines`
has the engines' processes (`inside` is what runs in them), `store` a real Redis, `damage` flips
bits and fills a disk, `controls` makes the calls of routers and operators. `verdict` says whether
all that holds which must.

Called by its command line. Imports the engine, and of the soak how processes are watched.
"""
