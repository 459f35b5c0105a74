"""Tables, figures and the HTML report, drawn from records alone."""
