"""Reports: tables, training curves, web pages and terminal output of what runs did, and generated documents."""
