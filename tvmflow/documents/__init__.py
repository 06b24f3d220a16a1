"""Documents that outlive their writer: releases, verdicts and the figures in them."""
