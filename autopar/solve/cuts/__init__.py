"""Pipeline cuts: problem, exact evaluation, dynamic programme, integer program."""
