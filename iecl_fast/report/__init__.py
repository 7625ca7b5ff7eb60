"""The report: one page of HTML over any number of runs, with everything in it.

`runs` gathers what lies in the run folders, `samples` and `projection` look at the encoders, `charts`, `curves`,
`tables` and `pictures` make pieces of the page, `page` puts them together.
"""
