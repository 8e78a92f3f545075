"""Acting: teams of agents on tasks, recorded turn by turn; engines import their libraries only when they are used."""
