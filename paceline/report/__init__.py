"""What is shown of a run: tables, statistics, and pages from one set of templates."""
