"""Tables, pictures and traces of plans and measurements."""
