"""The paper's tables and figures again: problems, runs, results and the page made of them."""
