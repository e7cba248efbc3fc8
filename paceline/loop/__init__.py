"""What goes round the core: record, evaluate, adapt, distill, learn from rewards. Imports the core; is never imported by it."""
