"""What every benchmark needs: cells, paired runs, figures with their spread, CPU accounting and the report."""
