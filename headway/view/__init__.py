"""What people see of a run: its trajectories, and the page that shows them and how the run goes."""
