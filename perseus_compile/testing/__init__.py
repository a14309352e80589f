"""Small models, inputs and measuring tools, shared by tests/, benchmarks/ and the command line."""
