"""Whether a posterior is right: against exact answers, against NUTS, and chain against chain."""
