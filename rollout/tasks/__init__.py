"""Sources of tasks: generators with demonstrations, published data files, leaks between splits.

generators         registry of the generators, by the name in `data.generator`
arithmetic         sums and word problems (arithmetic_demonstrations, written_sums)
encyclopedia       questions about a generated encyclopedia (encyclopedia_world)
formula_programs   short programs of two numbers
puzzles            games
repositories       packages with one bug (repository_functions)
tabular            tables to predict, generated ones and DSBench's
worlds             games of Gymnasium, ALFWorld and WebShop
teaching           scripted teachers, whose replies are demonstrations
splits             the split that a generated task belongs to

files              tasks of data files, whose formats are in fields and programs (rows)
hub_datasets       files of a data set of the Hugging Face hub
tiny_files         small generated files in the published formats
leaks              tasks that several splits have in common
"""
