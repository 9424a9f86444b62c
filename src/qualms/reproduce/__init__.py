"""The tables and figures of the paper: problems, studies, results."""
