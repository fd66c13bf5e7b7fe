"""Pipeline schedules as data: actions and their text, generators, the checker, the simulator."""
