"""Credit assignment: turns as training samples, their advantages, and an explanation of both."""
