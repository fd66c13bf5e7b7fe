"""`--cost measured | auto`: times compiled regions of the graphs that a rank would run, and keeps the times on disk.

Input: a graph of one rank. Output: names of operations with their `RegionTimes`.

Files in reading order:
    timed_regions.py        a graph as regions under anonymous names, so that equal blocks are timed once
    timing.py               a worker process: forward and backward of each region
    cache.py                times on disk, in one folder per setting
    region_times.py         `RegionTimer`: the cache first, then worker processes; the status says how far they are
"""
