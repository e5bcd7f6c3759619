"""One model on several devices: what each rank holds, how ranks talk to each other, and how they live and die."""
